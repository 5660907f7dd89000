# SPDX-License-Identifier: Apache-2.0
"""`kvlink simulate`: fleets of more workers than anybody has here, event by event, from the predictor's cost model.

sharing.py divides the rails among pulls, engine.py runs a fleet through time, workload.py turns a trace into jobs for
it, curve.py measures fleets of growing size, validation.py holds the simulation against real pulls on this machine.
"""
