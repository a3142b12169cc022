"""Public training scripts with their true stalls by line, to score the doctor on code that it was not made for.

`scripts.yaml` names each by repository, commit and command; no script is copied into this repository. Clone them into one
folder, under the names of the table, with the data that a script wants, and run

    python -m benchmarks.doctor_wild FOLDER                      on a GPU: verdicts beside plain runs, and patches proven
    python -m benchmarks.doctor_wild FOLDER --dry-run            on the pretend device, without prices
    python -m benchmarks.doctor_wild FOLDER --eye profiler       what another tool names
"""
