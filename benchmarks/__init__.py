"""Measurements that ``asyncrl bench NAME`` runs; one module a subject."""
