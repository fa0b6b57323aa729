//! libFuzzer on [`downbeat_fuzz::world`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::world(data));
