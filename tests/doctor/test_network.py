from pathlib import Path

import pytest
from hub_server import HubServer, hub_client

from finetune.doctor.network import check_hub


def test_a_hub_that_answers_is_ok(tmp_path: Path) -> None:
    with HubServer() as hub, hub_client(endpoint=hub.endpoint, home=tmp_path):
        check = check_hub()
    assert (check.name, check.status, check.remedy) == ("hub", "ok", "")
    assert check.finding == f"{hub.endpoint} answers"


def test_a_hub_that_does_not_answer_is_a_warning(tmp_path: Path) -> None:
    with hub_client(endpoint="http://127.0.0.1:9", home=tmp_path):
        check = check_hub()
    assert check.status == "warning"
    assert "http://127.0.0.1:9 can't be reached" in check.finding
    assert "HF_ENDPOINT" in check.remedy


def test_offline_mode_is_a_warning_that_names_the_variable(tmp_path: Path) -> None:
    with HubServer() as hub, hub_client(endpoint=hub.endpoint, home=tmp_path, offline=True):
        check = check_hub()
        assert hub.requests == []
    assert check.status == "warning"
    assert "HF_HUB_OFFLINE is set" in check.finding
    assert check.remedy == "unset HF_HUB_OFFLINE and run again"


def test_a_token_that_is_refused_is_a_warning_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HubServer() as hub, hub_client(endpoint=hub.endpoint, home=tmp_path):
        monkeypatch.setenv("HF_TOKEN", "hf_expired")
        hub.failures.refuses_tokens = True
        check = check_hub()
    assert check.status == "warning"
    assert "HF_TOKEN" in check.finding
    assert "settings/tokens" in check.remedy
