"""The benchmark house. `gpubound bench NAME` runs bench_NAME.py; results/ keeps a JSON line a case and peer."""
