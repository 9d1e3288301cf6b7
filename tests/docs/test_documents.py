"""The JSON documents of pure functions are as documents.toml says; those of an incident: test_examples.py."""

from __future__ import annotations

import pytest
from gpuserve_documents import DOCUMENTS, differences

from pytest_gpuserve.diagnose.evidence import Evidence
from pytest_gpuserve.diagnose.triage import explain
from pytest_gpuserve.diagnose.verdict import judge


def test_verdict():
    assert differences(judge(Evidence(reason="manual", rounds=[])).to_json()) == []


def test_triage(tmp_path):
    log = tmp_path / "server.log"
    log.write_text(
        "[2026-11-29 10:00:00 TP0] Load weight begin. avail mem=75.00 GB\ntorch.OutOfMemoryError: CUDA out of memory.\n"
    )
    assert differences(explain([str(log)]).to_json()) == []


def test_differences_are_found():
    document = judge(Evidence(reason="manual", rounds=[])).to_json()
    assert differences({**document, "colour": "red"}) == ["gpuserve.verdict/1: colour is not described"]
    assert differences({**document, "confidence": "high"}) == ["gpuserve.verdict/1: confidence is a string, not number"]
    del document["text"]
    assert differences(document) == ["gpuserve.verdict/1: text is missing"]
    with pytest.raises(KeyError):
        differences({"schema": "gpuserve.unheard-of/1"})


def test_types_are_words_of_json():
    words = {"string", "number", "integer", "boolean", "object", "array", "null"}
    for document in DOCUMENTS.values():
        for key, text in document["keys"].items():
            assert set(text.partition(":")[0].split("|")) <= words, (document["schema"], key)
