//! libFuzzer on [`downbeat_fuzz::http_connection`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::http_connection(data));
