"""The tables of metrics that `make chart` writes."""

from deploy.generate import SERVICES
from eyas.telemetry.metrics import ALL_METRICS


def test_every_metric_is_in_the_table_of_one_service() -> None:
    for metric in ALL_METRICS:
        assert len([service for service, begins in SERVICES.items() if metric.name.startswith(begins)]) == 1, metric.name
