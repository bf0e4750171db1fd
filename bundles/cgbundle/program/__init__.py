"""A loaded bundle on one device, and copies of it on several."""

from .program import Program as Program
