import pickle  # as Ray carries an error from a process to the driver

import pytest

from asyncrl.errors import AsyncRLError, ConfigError, DataError, FencedError, QueueError


def test_an_error_keeps_its_identifiers_through_pickle():
    error = pickle.loads(pickle.dumps(FencedError("incarnation 1 was replaced by 2", incarnation=1, endpoint="ipc://a")))
    assert type(error) is FencedError
    assert str(error) == "incarnation 1 was replaced by 2"
    assert (error.incarnation, error.endpoint) == (1, "ipc://a")


def test_every_error_is_also_a_standard_type():
    assert issubclass(ConfigError, ValueError) and issubclass(DataError, ValueError)
    assert issubclass(QueueError, RuntimeError) and issubclass(QueueError, AsyncRLError)


def test_an_unknown_identifier_is_an_attribute_error():
    with pytest.raises(AttributeError):
        _ = QueueError("x").group_id
