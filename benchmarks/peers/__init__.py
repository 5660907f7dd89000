# SPDX-License-Identifier: Apache-2.0
"""`kvlink bench peers`: kvlink, other transfer libraries and bare copies move the same blocks, in alternation.

adapters/ runs in a peer's own environment (`make peers`), modes.py says with which settings, contest.py holds the
rounds, bars.py what we promise.
"""
