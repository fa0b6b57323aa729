//! libFuzzer on [`downbeat_fuzz::recipe`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::recipe(data));
