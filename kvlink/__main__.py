# SPDX-License-Identifier: Apache-2.0
"""`python -m kvlink` is `kvlink`."""

from kvlink.cli import main

if __name__ == "__main__":
    main()
