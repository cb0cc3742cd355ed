"""Old names of metrics, which this version exports beside the new ones.

Contract: RENAMED has the old name of each renamed metric by its new name. The next version drops
the old names, and this module with them.
"""

RENAMED = {
    "kvfs_fast_opens_total": "kvfs_opens_fast_total",
    "kvfs_fast_lookups_total": "kvfs_lookups_fast_total",
    "kvfs_files_created_total": "kvfs_created_total",
    "kvfs_seals_total": "kvfs_sealed_total",
    "kvfs_files_settled_total": "kvfs_settled_total",
    "kvfs_copies_verified_total": "kvfs_verified_total",
    "kvfs_demotions_total": "kvfs_demoted_total",
    "kvfs_promotions_total": "kvfs_promoted_total",
    "kvfs_files_outrun_total": "kvfs_outrun_total",
    "kvfs_objects_dropped_total": "kvfs_dropped_total",
    "kvfs_copies_missing_total": "kvfs_missing_total",
    "kvfs_copies_quarantined_total": "kvfs_quarantined_total",
    "kvfs_files_swept_total": "kvfs_swept_total",
    "kvfs_objects_compressed_total": "kvfs_compressed_total",
    "kvfs_objects_not_compressed_total": "kvfs_not_compressed_total",
    "kvfs_objects_decompressed_total": "kvfs_decompressed_total",
    "kvfs_scrub_rotten_copies_total": "kvfs_scrub_rotten_total",
    "kvfs_scrub_unread_copies_total": "kvfs_scrub_unread_total",
    "kvfs_bucket_objects_found_total": "kvfs_bucket_found_total",
    "kvfs_bucket_objects_imported_total": "kvfs_bucket_imported_total",
    "kvfs_bucket_objects_stale_total": "kvfs_bucket_stale_total",
    "kvfs_bucket_keys_refused_total": "kvfs_bucket_refused_total",
    "kvfs_bucket_objects_prefetched_total": "kvfs_bucket_prefetched_total",
    "kvfs_bucket_prefetches_used_total": "kvfs_bucket_prefetch_used_total",
    "kvfs_bucket_prefetches_wasted_total": "kvfs_bucket_prefetch_wasted_total",
    "kvfs_bucket_objects_warmed_total": "kvfs_bucket_warmed_total",
    "kvfs_bucket_lookups_saved_total": "kvfs_bucket_absent_cached_total",
    "kvfs_namespace_objects_written_total": "kvfs_namespace_written_total",
    "kvfs_namespace_opened_bytes_total": "kvfs_namespace_read_bytes_total",
    "kvfs_writeback_active": "kvfs_writing_back",
    "kvfs_trash_files": "kvfs_trash",
    "kvfs_bucket_dirty_loaded": "kvfs_bucket_loaded",
    "kvfs_bucket_keys_to_delete": "kvfs_bucket_to_delete",
    "kvfs_bucket_objects_in_conflict": "kvfs_bucket_in_conflict",
    "kvfs_bucket_objects_streaming": "kvfs_bucket_streaming",
    "kvfs_namespace_hit_ratio_estimate": "kvfs_namespace_hit_ratio",
    "kvfs_namespace_without_tier": "kvfs_namespace_homeless",
}


def old_help(new: str) -> str:
    """Return the HELP of an old name."""
    return f"Old name of {new}. The next version drops it."
