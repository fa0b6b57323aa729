//! The settings of the log.

use downbeat_service::error::ServiceError;
use downbeat_service::logging::{self, LogChange, LogSettings};
use serde_json::{Value, json};

use super::{Settings, check_names, wrong};

/// The present settings of the log.
pub fn get() -> Settings {
    shown(&logging::settings())
}

fn shown(settings: &LogSettings) -> Settings {
    let LogSettings { error, warning, info, verbose, format } = settings;
    let value = json!({
        "log_file": "",
        "log_info": info,
        "log_warning": warning,
        "log_error": error,
        "log_verbose_level": verbose,
        "log_format": format,
    });
    value.as_object().cloned().unwrap_or_default()
}

/// Changes settings of the log. Returns all settings after the change. As in Triton, `null` leaves a
/// setting as it is.
///
/// # Errors
/// `InvalidArgument`, with the expected value; the errors of [`logging::change`].
pub fn change(wanted: &Settings) -> Result<Settings, ServiceError> {
    check_names("log", wanted, &get())?;
    // The words are Triton's.
    if wanted.get("log_file").is_some_and(|file| !file.is_null() && file != "") {
        let words = "log file location can not be updated through network protocol; the server logs to standard error";
        return Err(ServiceError::InvalidArgument(words.to_owned()));
    }
    let change = LogChange {
        error: switch(wanted, "log_error")?,
        warning: switch(wanted, "log_warning")?,
        info: switch(wanted, "log_info")?,
        verbose: match wanted.get("log_verbose_level") {
            None | Some(Value::Null) => None,
            Some(value) => Some(
                value
                    .as_u64()
                    .and_then(|level| u32::try_from(level).ok())
                    .ok_or_else(|| wrong("log_verbose_level", value, "0, 1 (debug) or 2 (trace)"))?,
            ),
        },
        format: match wanted.get("log_format") {
            None | Some(Value::Null) => None,
            Some(Value::String(format)) => Some(format.clone()),
            Some(value) => return Err(wrong("log_format", value, "a text, \"default\" or \"ISO8601\"")),
        },
    };
    logging::change(&change).map(|settings| shown(&settings))
}

fn switch(wanted: &Settings, name: &str) -> Result<Option<bool>, ServiceError> {
    match wanted.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Bool(value)) => Ok(Some(*value)),
        Some(value) => Err(wrong(name, value, "true or false")),
    }
}
