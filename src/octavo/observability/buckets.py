"""The bucket bounds that vLLM's and TGI's dashboards expect, and octavo's own; in seconds, tokens or sequences."""

from __future__ import annotations

from octavo.observability.instruments import decades, merged

__all__ = [
    "COUNTS",
    "E2E",
    "HTTP",
    "HTTP_FINE",
    "INTER_TOKEN",
    "ITERATION_TOKENS",
    "LENGTHS",
    "STEP",
    "TGI_BATCH",
    "TGI_DURATION",
    "TTFT",
]

# vLLM's.
TTFT = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75]
TTFT += [1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0]
INTER_TOKEN = [
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
]
E2E = [0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0]
E2E += [120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0]
ITERATION_TOKENS = [1.0, 8.0, *(float(16 << power) for power in range(11))]
COUNTS = [1.0, 2.0, 5.0, 10.0, 20.0]  # of answers a request asks for
LENGTHS = decades((1, 2, 5), 10_000_000)  # shown up to the longest a sequence can be

# TGI's: 35 bounds, each half as large again as the one before. It multiplies, and so must we to get the same labels.
TGI_DURATION = [0.0001 * 1.5]
while len(TGI_DURATION) < 35:
    TGI_DURATION.append(TGI_DURATION[-1] * 1.5)
TGI_BATCH = [float(1 << power) for power in range(11)]  # TGI has 1, 2, 3, ... 1024: a kilobyte a line for one histogram

# Of the instrumentation vLLM has of its HTTP routes.
HTTP = [0.1, 0.5, 1.0]
HTTP_FINE = [0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5]
HTTP_FINE += [10.0, 30.0, 60.0]

# octavo's own: phases of a step take from microseconds to seconds.
STEP = [0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5]
STEP += [1.0, 2.5, 5.0, 10.0]
assert merged(STEP) == STEP
