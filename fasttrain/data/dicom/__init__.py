"""Owns DICOM: series of slices as volumes, and masks that are drawn on them.

Needs the extra `dicom`; nothing of it is imported before a DICOM file is read.
"""
