//! libFuzzer on [`downbeat_fuzz::profile_cache`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::profile_cache(data));
