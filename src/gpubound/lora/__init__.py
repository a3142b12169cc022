"""Low-rank adapters over a frozen model."""
