"""Has schemathesis make requests from /openapi.json, valid and invalid ones, and looks for answers that are 5xx.

    python benchmarks/schemathesis_run.py [--cases 5000] [--seed 1]

The run fails when an answer has a status of 500 or more, or a status, content type or shape that the document does not
tell of.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from openapi_cases import SMALL_SERVER, try_cases
from recording import RESULTS, about_model, dashed, provenance, write
from server_process import ServerProcess


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file to write; else one in benchmarks/results")
    options = parser.parse_args()
    record = {"what": "requests made from the OpenAPI document", **provenance(["schemathesis", "hypothesis"])}
    words = [word for name, value in SMALL_SERVER.items() for word in ("--" + name.replace("_", "-"), str(value))]
    began = time.monotonic()
    with ServerProcess.octavo(*words, model=options.model) as server:
        tried = try_cases(server.address.url, options.cases, seed=options.seed)
        if not server.running():
            tried.faults["the server ended"] = server.log()[-3000:]
    record |= {
        "cases": tried.cases.total(),
        "seconds": time.monotonic() - began,
        "cases_by_operation": dict(tried.cases.most_common()),
        "statuses": {str(status): count for status, count in sorted(tried.statuses.items())},
        "faults": tried.faults,
    }
    record |= about_model(options.model)
    path = options.json or RESULTS / dashed(f"schemathesis {record['date'][:10]}.json")
    write(record, path)
    print(f"{record['cases']} cases, {len(tried.cases)} operations, answers by status {record['statuses']}")
    for name, fault in tried.faults.items():
        print(f"- {name}: {fault}\n")
    print(f"written to {path}")
    sys.exit(1 if tried.faults else 0)


if __name__ == "__main__":
    main()
