# SPDX-License-Identifier: Apache-2.0
"""`python -m kvlink` runs the same program as `kvlink`."""

from kvlink.cli import main

if __name__ == "__main__":
    main()
