//! A profile of the AWS tools: keys, region and endpoint in `~/.aws`.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use crate::FetchOptions;
use crate::failure::FetchError;

/// The settings of a profile that are used, and the variables that win over them.
const SETTINGS: [(&str, &str); 5] = [
    ("aws_access_key_id", "AWS_ACCESS_KEY_ID"),
    ("aws_secret_access_key", "AWS_SECRET_ACCESS_KEY"),
    ("aws_session_token", "AWS_SESSION_TOKEN"),
    ("region", "AWS_REGION"),
    ("endpoint_url", "AWS_ENDPOINT_URL"),
];

/// Settings that need a program of AWS to become keys.
const OTHERS: [&str; 4] = ["sso_session", "sso_start_url", "role_arn", "credential_process"];

/// The variables that the profile in use sets, where the environment does not.
///
/// # Errors
/// If `AWS_PROFILE` names a profile that does not exist, or that has no keys.
pub(crate) fn variables(options: &FetchOptions) -> Result<BTreeMap<String, String>, FetchError> {
    let home = || options.variable("HOME").map(PathBuf::from);
    let file = |variable: &str, name: &str| {
        let given = options.variable(variable).map(PathBuf::from);
        let path = given.or_else(|| Some(home()?.join(".aws").join(name)))?;
        // Larger than every such file.
        let is_small = fs::metadata(&path).is_ok_and(|metadata| metadata.is_file() && metadata.len() <= 1 << 20);
        is_small.then(|| fs::read_to_string(path).ok()).flatten()
    };
    let name = options.variable("AWS_PROFILE").or(options.variable("AWS_DEFAULT_PROFILE"));
    let profile = name.unwrap_or("default");
    let of_config = if profile == "default" { "default".to_owned() } else { format!("profile {profile}") };
    let config = file("AWS_CONFIG_FILE", "config").and_then(|text| section(&text, &of_config));
    let credentials = file("AWS_SHARED_CREDENTIALS_FILE", "credentials").and_then(|text| section(&text, profile));
    if let (Some(name), None, None) = (name, &config, &credentials) {
        return Err(FetchError::Address(format!("AWS_PROFILE names the profile '{name}', which ~/.aws does not have")));
    }
    let mut all = config.unwrap_or_default();
    all.extend(credentials.unwrap_or_default());
    let has_keys = all.contains_key("aws_access_key_id");
    let is_in_environment = options.variable("AWS_ACCESS_KEY_ID").is_some();
    if let (Some(name), Some(other)) = (name, OTHERS.into_iter().find(|other| all.contains_key(*other)))
        && !has_keys
        && !is_in_environment
    {
        return Err(FetchError::Address(format!(
            "the AWS profile '{name}' gets its keys by {other}, which only AWS' own tool follows; run: eval \"$(aws \
             configure export-credentials --profile {name} --format env)\""
        )));
    }
    let mut variables = BTreeMap::new();
    for (setting, variable) in SETTINGS {
        let is_key = setting.starts_with("aws_");
        // Keys of the environment and of a profile do not mix.
        if options.variable(variable).is_none()
            && !(is_key && is_in_environment)
            && let Some(value) = all.get(setting)
        {
            variables.insert(variable.to_owned(), value.clone());
        }
    }
    Ok(variables)
}

/// The settings of a section.
fn section(text: &str, name: &str) -> Option<BTreeMap<String, String>> {
    let (mut settings, mut is_in) = (None, false);
    for line in text.lines() {
        let trimmed = line.trim();
        if let Some(header) = trimmed.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            is_in = header.trim() == name;
            if is_in {
                settings.get_or_insert_with(BTreeMap::new);
            }
        } else if is_in
            && !trimmed.starts_with(['#', ';'])
            && !line.starts_with([' ', '\t'])
            && let (Some(settings), Some((key, value))) = (&mut settings, trimmed.split_once('='))
        {
            settings.insert(key.trim().to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    settings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(variables: &[(&str, &str)]) -> FetchOptions {
        FetchOptions {
            cache: None,
            offline: false,
            timeout: std::time::Duration::from_secs(1),
            bars: indicatif::MultiProgress::new(),
            variables: variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
        }
    }

    #[test]
    fn a_profile_sets_variables_that_the_environment_does_not() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join(".aws");
        fs::create_dir(&folder).unwrap();
        let config = "[default]\nregion = eu-west-1\n[profile work]\nregion=us-west-2\nendpoint_url = http://s3:9000\n\
                      [profile sso]\nsso_session = corp\n";
        fs::write(folder.join("config"), config).unwrap();
        let credentials = "[default]\naws_access_key_id = A\naws_secret_access_key = B\n# x\n[work]\n\
                           aws_access_key_id = C\naws_secret_access_key = D\n";
        fs::write(folder.join("credentials"), credentials).unwrap();
        let home = home.path().to_str().unwrap();
        let default = variables(&options(&[("HOME", home)])).unwrap();
        assert_eq!((default["AWS_ACCESS_KEY_ID"].as_str(), default["AWS_REGION"].as_str()), ("A", "eu-west-1"));
        let work = variables(&options(&[("HOME", home), ("AWS_PROFILE", "work"), ("AWS_REGION", "here")])).unwrap();
        assert_eq!(work["AWS_SECRET_ACCESS_KEY"], "D");
        assert_eq!(work["AWS_ENDPOINT_URL"], "http://s3:9000");
        assert!(!work.contains_key("AWS_REGION"));
        let keys = variables(&options(&[("HOME", home), ("AWS_ACCESS_KEY_ID", "own")])).unwrap();
        assert!(!keys.contains_key("AWS_SECRET_ACCESS_KEY"), "{keys:?}");
        let missing = variables(&options(&[("HOME", home), ("AWS_PROFILE", "none")])).unwrap_err().to_string();
        assert!(missing.contains("'none'"), "{missing}");
        let sso = variables(&options(&[("HOME", home), ("AWS_PROFILE", "sso")])).unwrap_err().to_string();
        assert!(sso.contains("aws configure export-credentials --profile sso"), "{sso}");
    }
}
