"""Reach disks and stores: everything that a checkpoint reads or writes goes through this folder.

disk_calls    every call that reaches a disk, or one of these stores, in one place
urls          folders in stores that fsspec reaches (s3://, gs://, ...), as paths
"""
