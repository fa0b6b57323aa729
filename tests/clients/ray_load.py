"""Requests whose answers are counted by number, while processes and nodes of a cluster die."""
import collections
import itertools
import threading

import requests

THREADS = 4


class Load:
    """Sends the model `identity_int32` one number after another, from the start to the end of the block. A request goes to another
    frontend if its connection breaks, or if a frontend that has just started knows no model yet, until it has an answer. `tried_again` counts
    these attempts."""

    def __init__(self, addresses):
        self.addresses, self.numbers = addresses, itertools.count()
        self.answered, self.refused, self.tried_again = collections.Counter(), collections.Counter(), 0
        self.lock, self.has_ended, self.threads = threading.Lock(), threading.Event(), []

    def __enter__(self):
        self.threads = [threading.Thread(target=self._send) for _ in range(THREADS)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.has_ended.set()
        for thread in self.threads:
            thread.join()

    def _send(self):
        with requests.Session() as session:
            session.trust_env = False
            while not self.has_ended.is_set():
                self._ask(session, next(self.numbers))

    def _ask(self, session, number):
        """Sends one number until an answer has come. Which frontend gets it goes around."""
        body = {"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [number]}]}
        for attempt in itertools.count(number):
            address = self.addresses[attempt % len(self.addresses)]
            try:
                answer = session.post(f"http://{address}/v2/models/identity_int32/infer", json=body, timeout=120)
            except requests.ConnectionError:
                answer = None
            if answer is None or (answer.status_code == 503 and "no backend serves a model yet, or no scheduler leads" in answer.text):
                with self.lock:
                    self.tried_again += 1
                # No frontend may answer for a moment.
                self.has_ended.wait(0.05)
                continue
            with self.lock:
                if answer.status_code == 200:
                    self.answered[answer.json()["outputs"][0]["data"][0]] += 1
                else:
                    self.refused[answer.status_code, answer.text] += 1
            return

    def count(self):
        with self.lock:
            return sum(self.answered.values())

    def check(self):
        """Each number that was sent came back once."""
        sent = next(self.numbers)
        assert not self.refused, self.refused
        assert self.answered == collections.Counter(range(sent)), f"{sent} sent; {self.answered - collections.Counter(range(sent))}"
