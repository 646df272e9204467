"""Dense transforms, and reading ahead."""

import math
import threading

import numpy as np
import pytest

from loka.recsys.data.dense import DenseTransform, Standardization, transform
from loka.recsys.data.read_ahead import read_ahead


def test_log1p_is_odd_and_raw_is_raw():
    x = np.array([0.0, 1.0, -2.0, 1.6e6], dtype=np.float32)
    want = [0.0, math.log(2), -math.log(3), math.log(1600001)]
    assert transform(x, DenseTransform.LOG1P).tolist() == pytest.approx(want, rel=1e-6)
    assert transform(x, DenseTransform.LOG1P).dtype == np.float32
    assert transform(x, DenseTransform.RAW).tolist() == x.tolist()


def test_standardization_in_parts_is_that_of_the_whole():
    rng = np.random.default_rng(0)
    x = (rng.lognormal(size=(1000, 3)) + np.array([1e4, 0, 5])).astype(np.float32)
    x[:, 2] = 5
    fitted = Standardization.fit((x[:1], x[1:1], x[1:400], x[400:]), 3)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(fitted.mean, wide.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(fitted.std[:2], wide.std(axis=0)[:2], rtol=1e-9)
    assert fitted.std[2] == 1  # a constant column is only shifted
    np.testing.assert_allclose(
        fitted.apply(x)[:, :2], (wide - wide.mean(0))[:, :2] / wide.std(0)[:2], rtol=1e-5, atol=1e-6
    )


def test_read_ahead_keeps_order_and_stops_its_thread():
    def three():
        yield from (1, 2, 3)

    before = threading.active_count()
    assert list(read_ahead(three())) == [1, 2, 3]
    assert threading.active_count() == before


def test_read_ahead_raises_in_its_place_and_closes_what_it_reads():
    closed = []

    def failing():
        try:
            yield 1
            raise KeyError("x")
        finally:
            closed.append(True)

    items = read_ahead(failing())
    assert next(items) == 1
    with pytest.raises(KeyError):
        next(items)
    early = read_ahead(failing())
    next(early)
    early.close()
    assert closed == [True, True]
