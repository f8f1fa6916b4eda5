"""Owns what a run leaves in its folder and reports while it goes on: observers of its events, and figures of the device."""
