//! The route `/v2/what-if`: the last requests, replayed under another setting.

use axum::extract::{Query, State};
use axum::http::StatusCode;
use downbeat_service::report::what_if::{MOST_DEVICES, MOST_FACTOR, WhatIfQuestion};
use downbeat_service::service::Service;

use super::answer::{HandlerResult, HttpError, ok};
use super::state::HttpState;

/// The longest name of a policy, bytes.
const MOST_NAME: usize = 64;

pub(super) async fn answer<S: Service>(
    State(state): State<HttpState<S>>,
    Query(parameters): Query<Vec<(String, String)>>,
) -> HandlerResult {
    let question = question(&parameters).map_err(|message| HttpError::new(StatusCode::BAD_REQUEST, message))?;
    ok(&state.service().what_if(question).await?)
}

/// The question in a query.
///
/// # Errors
/// If a parameter is unknown or out of range.
fn question(parameters: &[(String, String)]) -> Result<WhatIfQuestion, String> {
    let mut question = WhatIfQuestion { rate: 1.0, slo: 1.0, devices: None, policy: None };
    for (name, value) in parameters {
        match name.as_str() {
            "rate" => question.rate = factor("rate", value)?,
            "slo" => question.slo = factor("slo", value)?,
            "devices" => {
                let devices = value.parse().ok().filter(|devices| (1..=MOST_DEVICES).contains(devices));
                let expected = || format!("devices must be a whole number from 1 to {MOST_DEVICES}");
                question.devices = Some(devices.ok_or_else(expected)?);
            }
            "policy" if value.len() <= MOST_NAME => {
                question.policy = (!value.is_empty()).then(|| value.clone());
            }
            "policy" => return Err(format!("the name of a policy has at most {MOST_NAME} bytes")),
            _ => return Err("the parameters of a what-if are rate, slo, devices and policy".to_owned()),
        }
    }
    Ok(question)
}

/// A factor of the present value.
fn factor(name: &str, value: &str) -> Result<f64, String> {
    let least = 1.0 / MOST_FACTOR;
    let number = value.parse::<f64>().ok().filter(|number| (least..=MOST_FACTOR).contains(number));
    number.ok_or_else(|| format!("{name} must be a factor from {least} to {MOST_FACTOR}; 1 is the present value"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(parameters: &[(&str, &str)]) -> Result<WhatIfQuestion, String> {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        question(&parameters.iter().map(owned).collect::<Vec<_>>())
    }

    #[test]
    fn a_question_has_the_present_setting_where_it_says_nothing() {
        let plain = WhatIfQuestion { rate: 1.0, slo: 1.0, devices: None, policy: None };
        assert_eq!(asked(&[]), Ok(plain.clone()));
        assert_eq!(asked(&[("policy", "")]), Ok(plain));
        let whole = asked(&[("rate", "2.5"), ("slo", "0.5"), ("devices", "3"), ("policy", "timeout:20%+head")]);
        let policy = Some("timeout:20%+head".to_owned());
        assert_eq!(whole, Ok(WhatIfQuestion { rate: 2.5, slo: 0.5, devices: Some(3), policy }));
    }

    #[test]
    fn a_parameter_out_of_range_names_the_range() {
        for value in ["0", "-1", "21", "NaN", "inf", "fast", ""] {
            let error = asked(&[("rate", value)]).unwrap_err();
            assert_eq!(error, "rate must be a factor from 0.05 to 20; 1 is the present value", "{value}");
        }
        for value in ["0", "1001", "1.5", "-2"] {
            assert_eq!(asked(&[("devices", value)]).unwrap_err(), "devices must be a whole number from 1 to 1000");
        }
        assert!(asked(&[("policy", &"x".repeat(65))]).unwrap_err().contains("at most 64 bytes"));
        assert!(asked(&[("rates", "1")]).unwrap_err().contains("rate, slo, devices and policy"));
    }
}
