"""Requests that go together: a bounded queue, sequences of tokens grouped by length, and where their time goes."""
