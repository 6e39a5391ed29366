//! The description that is checked in is the one that the handlers make. TOWPATH_BLESS=1 writes it anew.

#[test]
fn the_checked_in_openapi_description_is_what_the_handlers_make() {
    let path = stage::checkout("schemas/openapi.json");
    let made = towpath_api::openapi().to_pretty_json().expect("description") + "\n";
    if std::env::var_os("TOWPATH_BLESS").is_some() {
        std::fs::write(&path, &made).expect("write");
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        kept == made,
        "schemas/openapi.json is not what the handlers make; run the tests once with TOWPATH_BLESS=1 and look at the difference"
    );
}
