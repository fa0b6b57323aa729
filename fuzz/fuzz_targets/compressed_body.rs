//! libFuzzer on [`downbeat_fuzz::compressed_body`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::compressed_body(data));
