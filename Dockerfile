# Images of rlbus: `control` has the NATS server, the controller and the CLI; `torch` has the torch engine and trainer, too.
#
# BASE_IMAGE: anything with a Python 3.11 or newer that has venv. PIP_OPTIONS: where packages come from; without an index,
# put wheels into docker/wheels and say --no-index (tests/compose does both).
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS base
# Of no rights; volumes that are mounted here are its own.
RUN useradd --uid 10001 --create-home rlbus && mkdir /data /model && chown rlbus /data /model
ENV PATH=/opt/rlbus/bin:$PATH PYTHONUNBUFFERED=1

FROM base AS build-control
ARG PIP_OPTIONS="--extra-index-url https://download.pytorch.org/whl/cpu"
WORKDIR /src
COPY docker/wheels /wheels
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY rlbus rlbus
COPY schemas schemas
COPY workers workers
COPY controller controller
# In a venv: Debian's own Python takes no packages otherwise (PEP 668).
RUN python3 -m venv /opt/rlbus \
 && pip install --no-cache-dir --disable-pip-version-check --find-links /wheels ${PIP_OPTIONS} -c constraints.txt .

FROM build-control AS build-torch
RUN pip install --no-cache-dir --disable-pip-version-check --find-links /wheels ${PIP_OPTIONS} -c constraints.txt '.[torch]'

FROM base AS torch
COPY --from=build-torch /opt/rlbus /opt/rlbus
USER rlbus
WORKDIR /home/rlbus
ENTRYPOINT ["rlbus"]

FROM base AS control
COPY --from=build-control /opt/rlbus /opt/rlbus
USER rlbus
WORKDIR /home/rlbus
ENTRYPOINT ["rlbus"]
