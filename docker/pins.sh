#!/bin/sh
# Prints constraints.txt, for the line of Flower that is asked for: pins.sh [1.39 | 1.42]
# constraints-1.39.txt has the pins that differ for the gRPC line.
set -eu
case "${1:-}" in
"" | 1.42*) cat constraints.txt ;;
1.39*) awk -F== '/^#/ { next } NR == FNR { own[$1] = 1; print; next } !($1 in own)' constraints-1.39.txt constraints.txt ;;
*) echo "FLWR=$1 is unknown: set 1.42, the default, or 1.39" >&2 && exit 1 ;;
esac
