#!/usr/bin/env bash
# A verdict on seven strategies against their full matrix, and an A/A study; see verdict_digits.yaml.
#
#   benchmarks/verdict_digits.sh          from the repository's root; an hour on two quiet cores
#
# Writes benchmarks/results/verdict/: what the verdict claimed and cost, and what the matrix of three
# repeats says of the same cells.
set -euo pipefail

out=benchmarks/results/verdict
mkdir -p "$out"
run() { snakemake "$@" --profile profiles/local --configfile benchmarks/verdict_digits.yaml; }

for study in digits-verdict digits-same; do
    began=$SECONDS
    run verdict --config "study=$study" 'verdict={rounds: all}'
    echo "$study ended by itself after $((SECONDS - began)) s" | tee "$out/$study-seconds.txt"
    cp "results/$study/verdict/verdict.json" "$out/$study.json"
    cp "results/$study/logs/verdict.log" "$out/$study.txt"
done
# The matrix has cells that the verdict has trained already: only the rest is trained.
run --config study=digits-verdict
cp results/digits-verdict/{cells,summary}.csv "$out"
PYTHONPATH=workflow python benchmarks/verdict_digits.py "$out" >"$out/digits.md"
cat "$out/digits.md"
