# Verifier and draft service, with torch. Build from the root of the repository: see build.sh.
# EXTRAS=[cpu,ray] with GROUPS="--group serving --group router" builds the image for Ray, with all services.
# [cpu] compiles what the host does between two passes, on GPUs too.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS build
# Additional package index: a mirror, or builds of torch for one kind of device.
ARG PIP_EXTRA_INDEX_URL
ARG EXTRAS=[cpu]
ARG GROUPS="--group serving"
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN python -m venv /venv
RUN /venv/bin/python -m pip install --constraint constraints.txt pip
# eyas/services is a link to services.
COPY eyas eyas
COPY services services
RUN /venv/bin/python -m pip install --constraint constraints.txt ".${EXTRAS}" ${GROUPS}
RUN /venv/bin/python -m pip uninstall --yes pip

FROM ${BASE}
# Triton compiles launchers of its kernels at run time.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /app
COPY --from=build /venv /venv
COPY deploy/docker/healthcheck.py ./
COPY models/demo models/demo
USER 10001:10001
EXPOSE 50051 50052 9464
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s CMD ["python", "healthcheck.py", "grpc://127.0.0.1:50051", "grpc://127.0.0.1:50052"]
CMD ["python", "-m", "eyas.services.verifier", "--help"]
