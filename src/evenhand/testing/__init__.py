"""Scripted fakes and slow references for tests, ours and those of users. Nothing imports it."""
