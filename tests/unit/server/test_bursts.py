"""A burst over HTTP: an idle engine fills its places and its queue, and refuses the rest."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httpx

from infer import LLM
from tests.support.app import Site
from tests.support.fake_client import FakeClient
from tests.unit.client.test_client import GatedDevice, make_client

NUM_SENT, NUM_PLACES, MAX_QUEUE = 300, 16, 32


def test_a_burst_of_300_serves_what_fits_the_places_and_the_queue(oracle: LLM) -> None:
    async def main() -> None:
        client, engine = make_client(
            1024, GatedDevice, max_queue=MAX_QUEUE, max_batch_size=NUM_PLACES
        )  # a device whose steps take as long as the test likes
        gate = engine._device.gate  # type: ignore[attr-defined]
        site = Site(cast(FakeClient, client), encoder=oracle.encoder)
        transport = httpx.ASGITransport(site.app)
        body: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 150, "ignore_eos": True}
        async with httpx.AsyncClient(transport=transport, base_url="http://site", timeout=60) as http:
            answers = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(NUM_SENT)]
            num_served = NUM_PLACES + MAX_QUEUE
            async with asyncio.timeout(60):
                while sum(answer.done() for answer in answers) < NUM_SENT - num_served:
                    gate.release()  # a step; no answer is complete before 150 of them
                    await asyncio.sleep(0.01)
            refused = [answer.result() for answer in answers if answer.done()]
            assert {response.status_code for response in refused} == {503}
            assert all(int(response.headers["retry-after"]) > 0 for response in refused)
            gate.release(1000)
            codes = [(await answer).status_code for answer in answers]
        assert codes.count(200) == num_served == 48
        await client.close()

    asyncio.run(main())
