# SPDX-License-Identifier: Apache-2.0
"""Implements `kvlink simulate`: large fleets, event by event, from the predictor's cost model.

sharing.py divides the rails among pulls, engine.py runs a fleet through time, fleets.py turns a trace into jobs
and measures fleets of growing size, validation.py compares the simulation with real pulls on this machine.
"""
