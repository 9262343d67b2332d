# One image for every member of a cluster: router, nodes and client. Needs nothing but Python packages.
#
# A node starts as root, because only root may shape its link; it becomes PDEMU_USER before it opens a socket.
# With `--build-arg EXTRA=cuda12` it has CuPy, pinned in requirements-cuda12.lock, for nodes that compute on a GPU; the
# driver comes with the GPU that a container reserves.
#
# An index other than pip's own, or a proxy, are build arguments; a private CA belongs into PYTHON_IMAGE.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG PIP_INDEX_URL
ARG EXTRA=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY pyproject.toml requirements*.lock ./
COPY tools/lock_subset.py tools/
RUN python tools/lock_subset.py > runtime.lock \
 && python tools/lock_subset.py hatchling > build.lock \
 && python -m venv --without-pip /opt/pdemu \
 && pip --python /opt/pdemu/bin/python install --require-hashes -r runtime.lock \
 && if [ -n "$EXTRA" ]; then pip --python /opt/pdemu/bin/python install --require-hashes -r "requirements-$EXTRA.lock"; fi \
 && pip install --require-hashes -r build.lock
COPY README.md ./
COPY emulator emulator
RUN pip wheel --no-deps --no-build-isolation --wheel-dir dist . \
 && pip --python /opt/pdemu/bin/python install --no-deps dist/*.whl

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/pdemu /opt/pdemu
ENV PATH=/opt/pdemu/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PDEMU_USER=10001:10001 \
    PDEMU_STAY=1 \
    CUPY_CACHE_DIR=/tmp/pdemu-cupy \
    PDEMU_HEALTH_FILE=/tmp/pdemu-health.json
WORKDIR /lab
RUN install -d -m 1777 locks
COPY topologies topologies
ENTRYPOINT ["pdemu"]
