//! The time a client gives a call (`grpc-timeout`), as the request's `timeout` parameter.

use downbeat_protocol::{InferRequest, Parameter};
use http::{HeaderMap, HeaderName};

const TIMEOUT: &str = "timeout";
const CALL_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

/// The time a client gives this call, microseconds, rounded up; `None` if it gives no readable time
/// (gRPC: 1 to 8 digits and a unit).
pub(super) fn call_timeout_us(headers: &HeaderMap) -> Option<u64> {
    let text = headers.get(&CALL_TIMEOUT)?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    // At most 8 digits of hours cannot overflow.
    Some(match unit {
        "H" => count * 3_600_000_000,
        "M" => count * 60_000_000,
        "S" => count * 1_000_000,
        "m" => count * 1_000,
        "u" => count,
        "n" => count.div_ceil(1_000),
        _ => return None,
    })
}

/// Bounds the request by the call's timeout: no client reads a later answer.
pub(super) fn bound(request: &mut InferRequest, call_timeout_us: Option<u64>) {
    let Some(call) = call_timeout_us else { return };
    // 0 would mean no timeout.
    let call = call.max(1);
    let tighter = match request.parameters.get(TIMEOUT) {
        // Zero or less means no timeout. The service refuses other types than numbers.
        Some(Parameter::Int64(own)) => u64::try_from(*own).is_ok_and(|own| own == 0 || call < own),
        Some(Parameter::Uint64(own)) => *own == 0 || call < *own,
        Some(_) => false,
        None => true,
    };
    if tighter {
        request.parameters.insert(TIMEOUT.into(), Parameter::Uint64(call));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Option<u64> {
        let mut headers = HeaderMap::new();
        headers.insert("grpc-timeout", text.parse().unwrap());
        call_timeout_us(&headers)
    }

    #[test]
    fn every_unit_is_read() {
        assert_eq!(parsed("2H"), Some(7_200_000_000));
        assert_eq!(parsed("3M"), Some(180_000_000));
        assert_eq!(parsed("4S"), Some(4_000_000));
        assert_eq!(parsed("5m"), Some(5_000));
        assert_eq!(parsed("6u"), Some(6));
        assert_eq!(parsed("7001n"), Some(8));
        assert_eq!(parsed("99999999H"), Some(99_999_999 * 3_600_000_000));
    }

    #[test]
    fn what_is_no_timeout_is_none() {
        for text in ["", "m", "5", "-5m", "+5m", "5x", "123456789m", "5 m"] {
            assert_eq!(parsed(text), None, "{text:?}");
        }
        assert_eq!(call_timeout_us(&HeaderMap::new()), None);
    }

    #[test]
    fn the_smaller_timeout_wins() {
        let bounded = |own: Option<Parameter>, call| {
            let mut request = InferRequest::default();
            request.parameters.extend(own.map(|own| (TIMEOUT.to_owned(), own)));
            bound(&mut request, call);
            request.parameters.remove(TIMEOUT)
        };
        assert_eq!(bounded(None, None), None);
        assert_eq!(bounded(None, Some(50)), Some(Parameter::Uint64(50)));
        assert_eq!(bounded(Some(Parameter::Int64(40)), Some(50)), Some(Parameter::Int64(40)));
        assert_eq!(bounded(Some(Parameter::Int64(60)), Some(50)), Some(Parameter::Uint64(50)));
        assert_eq!(bounded(Some(Parameter::Uint64(0)), Some(50)), Some(Parameter::Uint64(50)));
        assert_eq!(bounded(None, Some(0)), Some(Parameter::Uint64(1)));
        assert_eq!(bounded(Some(Parameter::Int64(-1)), Some(50)), Some(Parameter::Int64(-1)));
    }
}
