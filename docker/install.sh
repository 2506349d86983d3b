#!/bin/sh
# Installs the pinned packages into /opt/venv, lists them in sbom.cdx.json (CycloneDX) there, and
# removes what no container needs.
#   install.sh [further options of uv pip install]
set -eu
export UV_NO_CONFIG=1 UV_LINK_MODE=copy VIRTUAL_ENV=/opt/venv
cd /build
uv venv --quiet /opt/venv
uv pip install --no-progress -c constraints.txt --excludes left-out.txt -r requirements.txt "$@"
UV_TOOL_DIR=/tmp/tools uv tool run --quiet --from cyclonedx-bom==7.5.0 cyclonedx-py environment \
  --output-reproducible --output-file /opt/venv/sbom.cdx.json /opt/venv/bin/python
rm -r /tmp/*

cd /opt/venv/lib/python3*/site-packages
# Tests of numpy, scipy, pandas, scikit-learn, ...; what only a compiler reads.
find . -type d -name tests -prune -exec rm -r {} +
rm -rf torch/bin/protoc* torch/include torch/share pyarrow/include nvidia/*/include nvidia/cccl
rm -f pyarrow/*flight*
find . \( -name '*.a' -o -name '*.pyx' -o -name '*.pxd' \) -delete
# Of CUDA: for kernels that use NVSHMEM, its other networks, profilers, several GPUs in one solver.
rm -f nvidia/nvshmem/lib/*.bc nvidia/nvshmem/lib/nvshmem_* nvidia/cu13/lib/libnvperf* \
  nvidia/cu13/lib/libpcsampling* nvidia/cu13/lib/libcheckpoint* nvidia/cu13/lib/libcusolverMg*
# By content, so that an image built twice has the same bytes.
# Some packages have templates that are no Python.
/opt/venv/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash . || true
