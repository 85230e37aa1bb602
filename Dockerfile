# Images of rlbus: `control` has the NATS server, the controller and the CLI; `torch` has the torch engine and trainer, too.
#
# BASE_IMAGE: anything with a Python 3.11 or newer that has venv. PIP_OPTIONS: where packages come from; without an index,
# put wheels into docker/wheels and say --no-index (tests/compose does both).
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS base
# A user without rights; the volumes that are mounted here start as its own.
RUN useradd --uid 10001 --create-home rlbus && mkdir /data /model && chown rlbus /data /model
ENV PATH=/opt/rlbus/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /home/rlbus

# What rlbus needs comes before rlbus itself, so that a change of the source doesn't install torch again.
FROM base AS needs
ARG PIP_OPTIONS="--extra-index-url https://download.pytorch.org/whl/cpu"
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_FIND_LINKS=/wheels PIP_CONSTRAINT=/src/constraints.txt
WORKDIR /src
COPY docker/wheels /wheels
COPY docker/needs.py docker/needs.py
COPY pyproject.toml constraints.txt ./
# In a venv: Debian's own Python takes no packages otherwise (PEP 668).
RUN python3 -m venv /opt/rlbus \
 && python3 docker/needs.py > needs.txt && pip install ${PIP_OPTIONS} -r needs.txt

FROM needs AS build-control
ARG PIP_OPTIONS="--extra-index-url https://download.pytorch.org/whl/cpu"
COPY . .
RUN pip install ${PIP_OPTIONS} --no-deps . && cp docker/healthy.py docker/nats.conf /opt/rlbus/

FROM base AS control
COPY --from=build-control /opt/rlbus /opt/rlbus
USER rlbus
ENTRYPOINT ["rlbus"]

# Below `control`, since Docker without BuildKit builds every stage above the one that is asked for.
FROM needs AS build-torch
ARG PIP_OPTIONS="--extra-index-url https://download.pytorch.org/whl/cpu"
RUN python3 docker/needs.py torch > needs.txt && pip install ${PIP_OPTIONS} -r needs.txt
COPY . .
RUN pip install ${PIP_OPTIONS} --no-deps . && cp docker/healthy.py /opt/rlbus/

FROM base AS torch
COPY --from=build-torch /opt/rlbus /opt/rlbus
USER rlbus
ENTRYPOINT ["rlbus"]
