//! Triton's restricted APIs: a group of requests that needs a header with a secret value.

use downbeat_service::options::{AccessOptions, Api, RestrictedApis};
use http::HeaderMap;
use subtle::ConstantTimeEq;

use super::Denied;

/// The beginning of the header's name over gRPC.
const GRPC_PREFIX: &str = "triton-grpc-protocol-";

/// The restrictions of both protocols.
#[derive(Clone, Default)]
pub(super) struct Restricted {
    http: Vec<RestrictedApis>,
    grpc: Vec<RestrictedApis>,
}

impl Restricted {
    pub fn of(options: &AccessOptions) -> Self {
        let (http, mut grpc) = (options.restricted_http.clone(), options.restricted_grpc.clone());
        grpc.iter_mut().for_each(|rule| rule.header.insert_str(0, GRPC_PREFIX));
        Restricted { http, grpc }
    }

    pub fn check_http(&self, api: Api, headers: &HeaderMap) -> Result<(), Denied> {
        check(&self.http, api, headers)
    }

    pub fn check_grpc(&self, api: Api, headers: &HeaderMap) -> Result<(), Denied> {
        check(&self.grpc, api, headers)
    }
}

fn check(rules: &[RestrictedApis], api: Api, headers: &HeaderMap) -> Result<(), Denied> {
    for rule in rules.iter().filter(|rule| rule.apis.contains(&api)) {
        let given = headers.get(rule.header.as_str()).map_or(&[][..], |value| value.as_bytes());
        if !bool::from(given.ct_eq(rule.value.as_bytes())) {
            return Err(Denied::Restricted { header: rule.header.clone() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn options(http: &str, grpc: &str) -> AccessOptions {
        AccessOptions {
            restricted_http: vec![http.parse().unwrap()],
            restricted_grpc: vec![grpc.parse().unwrap()],
            ..AccessOptions::default()
        }
    }

    #[test]
    fn a_restricted_api_needs_its_header_and_others_need_none() {
        let restricted = Restricted::of(&options("inference,model-repository:admin=secret", "health:admin=other"));
        let with = |header: &'static str, value: &'static str| {
            HeaderMap::from_iter([(header.parse().unwrap(), HeaderValue::from_static(value))])
        };
        assert!(restricted.check_http(Api::Health, &HeaderMap::new()).is_ok());
        assert!(restricted.check_http(Api::Inference, &with("admin", "secret")).is_ok());
        for wrong in [HeaderMap::new(), with("admin", "secre"), with("admin", ""), with("other", "secret")] {
            let denied = restricted.check_http(Api::ModelRepository, &wrong).unwrap_err();
            assert_eq!(denied.to_string(), "This API is restricted, expecting header 'admin'");
        }
        assert!(restricted.check_grpc(Api::Health, &with("triton-grpc-protocol-admin", "other")).is_ok());
        assert!(restricted.check_grpc(Api::Health, &with("admin", "other")).is_err());
        assert!(restricted.check_grpc(Api::Inference, &HeaderMap::new()).is_ok());
    }
}
