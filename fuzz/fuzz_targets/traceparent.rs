//! libFuzzer on [`downbeat_fuzz::traceparent`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::traceparent(data));
