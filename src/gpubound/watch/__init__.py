"""Sensors, the ledger and the guard."""
