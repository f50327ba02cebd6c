"""Clients of what the fixture `served` serves."""

from __future__ import annotations

from typing import Any

import visionfast as vf

__all__ = ["async_client_of", "client_of", "url_of"]


def url_of(served: Any, scheme: str) -> str:
    url: str = served.grpc_url if scheme == "grpc" else served.http_url
    return url


def client_of(served: Any, scheme: str = "grpc") -> vf.Client:
    return vf.Client(url_of(served, scheme), served.name)


def async_client_of(served: Any, scheme: str) -> vf.AsyncClient:
    return vf.AsyncClient(url_of(served, scheme), served.name)
