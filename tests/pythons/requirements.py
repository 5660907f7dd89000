# SPDX-License-Identifier: Apache-2.0
"""Prints what kvlink's own modules need, without engines, from the metadata of the kvlink that is installed here."""

from __future__ import annotations

import re
from importlib.metadata import requires

_EXTRAS = {"router", "metrics", "certs", "otel", "report"}

for each in requires("kvlink") or []:
    extra = re.search(r"extra == ['\"](\w+)['\"]", each)
    if extra is None:
        print(each)
    elif extra[1] in _EXTRAS:
        print(each.partition(";")[0])
