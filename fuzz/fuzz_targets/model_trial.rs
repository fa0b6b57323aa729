//! libFuzzer on [`downbeat_fuzz::model_trial`]. With the argument `executor` the program is the
//! process that tries a file.
#![no_main]

libfuzzer_sys::fuzz_target!(
    init: {
        if std::env::args().nth(1).is_some_and(|argument| argument == "executor") {
            let served = downbeat_engine::isolation::serve(&downbeat_engine_ort::of_executor);
            std::process::exit(i32::from(served.is_err()));
        }
    },
    |data: &[u8]| downbeat_fuzz::model_trial(data)
);
