# SPDX-License-Identifier: Apache-2.0
"""The fault table: what a client gets when something goes wrong, with kvlink's connector and with NIXL's.

    python tests/engines/fault_table.py [--connectors KVLinkConnector,NixlConnector] [--models llama,granite-hybrid]
        [--policy fail] [--only reuse,swap]

Each connector has two servers of its own for each model, with the same flags, one after the other. Ends with 1 when a
client got wrong tokens from kvlink.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from connectors import pair_of
from faults import SCENARIOS, Outcome, play
from references import references_for


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--connectors", default="KVLinkConnector,NixlConnector")
    parser.add_argument(
        "--models", default="llama,granite-hybrid", help="of build/engines/models, with commas"
    )
    parser.add_argument(
        "--policy", choices=("fail", "recompute"), default="fail", help="of vLLM, for failed loads"
    )
    parser.add_argument("--only", default=",".join(SCENARIOS), help="scenarios, with commas")
    parser.add_argument("--json", action="store_true", help="JSON lines, as they come")
    options = parser.parse_args()
    connectors, names = options.connectors.split(","), options.only.split(",")
    table = played(options, connectors, names)
    if not options.json:
        print(f"\nLoad failure policy: {options.policy}.\n\n{markdown(table, connectors)}")
    return any(
        not outcome.safe
        for row in table.values()
        for name, outcome in row.items()
        if name == "KVLinkConnector"
    )


def played(
    options: argparse.Namespace, connectors: Sequence[str], names: Sequence[str]
) -> dict[tuple[str, str], dict[str, Outcome]]:
    """Returns the outcomes by model and scenario, then by connector, and prints them as they come."""
    table: dict[tuple[str, str], dict[str, Outcome]] = {}
    for model in options.models.split(","):
        references = references_for(model)
        try:
            for connector in connectors:
                with pair_of(connector, model, options.policy) as pair:
                    for name in names:
                        outcome = play(SCENARIOS[name], pair, references)
                        table.setdefault((model, name), {})[connector] = outcome
                        output = {
                            "scenario": name,
                            "model": model,
                            "connector": connector,
                            "policy": options.policy,
                            "outcome": str(outcome),
                            "noticed": outcome.noticed,
                        }
                        text = f"{name}, {model}, {connector}: {outcome}"
                        print(json.dumps(output) if options.json else text, flush=True)
        finally:
            references.close()
    return table


def markdown(table: dict[tuple[str, str], dict[str, Outcome]], connectors: list[str]) -> str:
    """A row a model and a scenario; two columns a connector: what the client got, whose metrics moved."""
    head = ["scenario", *(cell for name in connectors for cell in (name, "noticed by"))]
    rows = [head, ["---"] * len(head)]
    for (model, name), outcomes in table.items():
        what = " ".join((SCENARIOS[name].__doc__ or "").split())
        row = [f"**{name}**, {model}: {what}"]
        for connector in connectors:
            outcome = outcomes[connector]
            row += [str(outcome), "; ".join(outcome.noticed) or "nobody"]
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
