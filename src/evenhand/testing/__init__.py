"""Scripted fakes and slow references for tests, ours and yours. Nothing in evenhand imports it."""
