//! libFuzzer on [`downbeat_fuzz::downbeat_toml`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::downbeat_toml(data));
