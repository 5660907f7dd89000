# SPDX-License-Identifier: Apache-2.0
"""Implements `kvlink bench peers`: kvlink, other transfer libraries and bare copies move the same blocks in turns.

adapters/ runs in a peer's own environment (`make peers`), modes.py has the settings, contest.py runs the rounds,
bars.py judges the promises.
"""
