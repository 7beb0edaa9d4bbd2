"""The network interface of a part."""

from typing import Any

import pytest

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.engine.machine.network_interface import name_network

TWO = ("eth0", "ib0")


def settings(**run: Any) -> Settings:
    """With these settings of [run]."""
    return Settings(model={"path": "m"}, run=run)


def test_one_setting_names_the_network_to_both_libraries() -> None:
    """And a name that this machine's environment has stays."""
    environment = {"GLOO_SOCKET_IFNAME": "bond0"}
    name_network(settings(network_interface="ib0"), environment=environment, interfaces=lambda: TWO)
    assert environment == {"GLOO_SOCKET_IFNAME": "bond0", "NCCL_SOCKET_IFNAME": "ib0"}
    environment = {}
    name_network(settings(), environment=environment, interfaces=lambda: TWO)
    assert environment == {}


def test_an_interface_that_is_not_here_is_refused_by_name() -> None:
    """NCCL would say that it found none, after the processes had waited for each other."""
    with pytest.raises(SettingsError, match=r"'eth7' is not on this machine, which has eth0, ib0"):
        name_network(settings(network_interface="eth7"), environment={}, interfaces=lambda: TWO)
    with pytest.raises(ValueError, match="network_interface"):
        settings(network_interface="eth0,eth1")
