"""Processes: how ranks start, meet, form groups and agree."""
