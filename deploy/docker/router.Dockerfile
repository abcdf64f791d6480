# The router, without torch. Build from the root of the repository: see build.sh.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS build
# Additional package index, such as a mirror.
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt pyproject.toml ./
RUN python -m venv /venv
RUN /venv/bin/python -m pip install --constraint constraints.txt pip
RUN /venv/bin/python -m pip install --constraint constraints.txt --group router
COPY README.md LICENSE ./
# eyas/services is a link to services.
COPY eyas eyas
COPY services services
RUN /venv/bin/python -m pip install --no-deps .
RUN /venv/bin/python -m pip uninstall --yes pip

FROM ${BASE}
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /app
COPY --from=build /venv /venv
COPY deploy/docker/healthcheck.py ./
COPY models/demo/target/config.json models/demo/target/generation_config.json models/demo/target/tokenizer.json models/demo/target/tokenizer_config.json models/demo/target/chat_template.jinja models/demo/target/
USER 10001:10001
EXPOSE 50050 8000 8080 9464
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "healthcheck.py", "http://127.0.0.1:8000/live", "https://127.0.0.1:8000/live"]
CMD ["python", "-m", "eyas.services.router", "--help"]
