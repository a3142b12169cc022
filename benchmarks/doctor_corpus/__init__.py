"""Scripts with one known stall each, to score whatever claims to find stalls.

A kind of stall is one small file in `kinds/`. It says how to plant itself into the slots of a training script, which lines are
to blame, and what the same script looks like without it. `hosts.py` has the scripts: a plain loop, a trainer class, a loop
whose work lies in another file. Each is written for two models: one bound by launches, one by the GPU. `controls.py` are
scripts without a stall, `decoys.py` scripts with a famous pattern that costs nothing where it stands.

    python -m benchmarks.doctor_corpus FOLDER      writes them all, with truth.json
"""
