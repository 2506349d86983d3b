#!/bin/sh
# Prints constraints.txt, for the line of Flower that is asked for: pins.sh [1.39]
# constraints-1.39.txt has the pins that differ for the gRPC line.
set -eu
case "${1:-}" in
"") cat constraints.txt ;;
1.39*) awk -F== '/^#/ { next } NR == FNR { own[$1] = 1; print; next } !($1 in own)' constraints-1.39.txt constraints.txt ;;
*) echo "FLWR=$1 is unknown: leave it out, or set 1.39" >&2 && exit 1 ;;
esac
